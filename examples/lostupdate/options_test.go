package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

func TestWrongFlags(t *testing.T) {
	// Were anything started it would fail by this, with another exit code.
	t.Setenv("PGLOCK_PG", "nothing")
	tests := []struct {
		args []string
		want []string // the value, and the remedy
	}{
		{[]string{"-workers=0"}, []string{"-workers=0", "1 to 64"}},
		{[]string{"-workers=65"}, []string{"-workers=65", "1 to 64"}},
		{[]string{"-workers=many"}, []string{`"many"`, "-workers", "-h lists the flags"}},
		{[]string{"-ops=-1"}, []string{"-ops=-1", "1 to 100000"}},
		{[]string{"-think=-1ms"}, []string{"-think=-1ms", "0s to 10s"}},
		{[]string{"-think=11s"}, []string{"-think=11s", "0s to 10s"}},
		{[]string{"-think=2"}, []string{`"2"`, "-think"}},
		{[]string{"-ttl=99ms"}, []string{"-ttl=99ms", "100ms to 1m0s"}},
		{[]string{"-ttl=61s"}, []string{"-ttl=1m1s", "100ms to 1m0s"}},
		{[]string{"-only=row,rows"}, []string{"-only=row,rows", `no "rows"`, "optimistic, unfenced, fenced"}},
		{[]string{"-only="}, []string{`no ""`, "choose from none, row"}},
		{[]string{"-dsn="}, []string{`-dsn=""`, "leave the flag out"}},
		{[]string{"-dsn=postgres://h:port/"}, []string{"-dsn: give postgres://", "port"}},
		{[]string{"-html="}, []string{"-html=", "name of a file"}},
		{[]string{"-html=-"}, []string{"-html=-", "name of a file"}},
		{[]string{"-html=nowhere/page.html"}, []string{"-html=nowhere/page.html", "a folder that can be written to", "no such file"}},
		{[]string{"-html=.."}, []string{"-html=..", "give a file", "not a regular file"}},
		{[]string{"-svg=" + os.DevNull}, []string{"-svg=" + os.DevNull, "not a regular file"}},
		{[]string{"-html=nowhere/x", "-svg=nowhere/x"}, []string{"-svg=nowhere/x", "a file of its own"}},
		{[]string{"-svg=nowhere/x", "-only=row"}, []string{"-svg=nowhere/x", "-only", "unfenced or fenced"}},
		{[]string{"-fast"}, []string{"-fast", "-h lists the flags"}},
		{[]string{"row"}, []string{`"row"`, "flags only"}},
	}
	for _, test := range tests {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			if code := run(t.Context(), test.args, &stdout, &stderr); code != 2 {
				t.Errorf("exit %d", code)
			}
			for _, want := range test.want {
				if !strings.Contains(stderr.String(), want) {
					t.Errorf("%q lacks %q", stderr.String(), want)
				}
			}
			if stdout.Len() > 0 || strings.Count(stderr.String(), "\n") != 1 {
				t.Errorf("standard output %q, standard error %q", stdout.String(), stderr.String())
			}
		})
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()
	var stdout, stderr bytes.Buffer
	if code := run(t.Context(), []string{"-h"}, &stdout, &stderr); code != 0 || stderr.Len() > 0 {
		t.Errorf("exit %d, standard error %q", code, stderr.String())
	}
	for _, name := range []string{"workers", "ops", "think", "ttl", "only", "json", "html", "svg", "dsn", "keep"} {
		if !strings.Contains(stdout.String(), "\n  -"+name) {
			t.Errorf("no -%s in %s", name, stdout.String())
		}
	}
}
