package main

import (
	"fmt"
	"net/url"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
)

// etcdServer runs an etcd with its defaults, fsync included, until the process
// is ended. It is this program's other life: the harness runs itself again with
// the folder and the two ports, so that the server's CPU and memory are not the
// clients'.
func etcdServer(args []string) error {
	if len(args) != 3 {
		return fmt.Errorf("etcd %q: want a folder and two ports", args)
	}
	cfg := embed.NewConfig()
	cfg.Dir = args[0]
	cfg.LogLevel = "error"
	clients := []url.URL{{Scheme: "http", Host: "127.0.0.1:" + args[1]}}
	peers := []url.URL{{Scheme: "http", Host: "127.0.0.1:" + args[2]}}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = clients, clients
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = peers, peers
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	select {
	case <-e.Server.ReadyNotify():
	case <-time.After(30 * time.Second):
		return fmt.Errorf("etcd in %s is not ready after 30 s", args[0])
	}
	fmt.Println("ready")
	return <-e.Err()
}
