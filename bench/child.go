package main

import (
	"context"
	"fmt"
	"os"
	"time"
)

// children are the program's other lives: what it runs as when it runs itself.
var children = map[string]func(args []string) error{
	"etcd":   etcdServer,
	"holder": hold,
}

// hold takes a name in a contender's server, says so, and keeps it until the
// process is ended.
func hold(args []string) error {
	if len(args) != 4 {
		return fmt.Errorf("hold %q: want contender, address, TTL and name", args)
	}
	chosen, err := choose(contenders, args[0])
	if err != nil {
		return err
	}
	ttl, err := time.ParseDuration(args[2])
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := chosen[0].dial(ctx, args[1], 1, ttl)
	if err != nil {
		return err
	}
	if _, err := c.acquire(ctx, args[3]); err != nil {
		return err
	}
	fmt.Println("held")
	_, err = os.Stdin.Read(make([]byte, 1)) // blocks for as long as the parent lives
	return err
}
