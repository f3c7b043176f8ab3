package pglock_test

import (
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/pglock"
)

// lookalike is a server that talks PostgreSQL's protocol and says yes to every
// advisory lock, as several engines do that keep none.
func lookalike(t *testing.T) (dsn string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				answer(pgproto3.NewBackend(conn, conn))
			})
		}
	})
	t.Cleanup(func() { listener.Close(); wg.Wait() })
	return "postgres://someone@" + listener.Addr().String() + "/some?sslmode=disable"
}

const lookalikePID = 4711

func answer(b *pgproto3.Backend) {
	if _, err := b.ReceiveStartupMessage(); err != nil {
		return
	}
	b.Send(&pgproto3.AuthenticationOk{})
	b.Send(&pgproto3.ParameterStatus{Name: "standard_conforming_strings", Value: "on"})
	b.Send(&pgproto3.ParameterStatus{Name: "client_encoding", Value: "UTF8"})
	b.Send(&pgproto3.BackendKeyData{ProcessID: lookalikePID, SecretKey: []byte{1, 2, 3, 4}})
	for {
		b.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
		if b.Flush() != nil {
			return
		}
		message, err := b.Receive()
		if err != nil {
			return
		}
		query, ok := message.(*pgproto3.Query)
		if !ok {
			return
		}
		for sql := range strings.SplitSeq(query.String, ";") {
			if strings.TrimSpace(sql) != "" {
				answerOne(b, sql)
			}
		}
	}
}

func answerOne(b *pgproto3.Backend, sql string) {
	var oids []uint32
	var values [][]byte
	column := func(oid uint32, value string) { oids, values = append(oids, oid), append(values, []byte(value)) }
	const boolean, integer = 16, 20
	switch {
	case strings.Contains(sql, "pg_backend_pid(), pg_is_in_recovery()"):
		column(integer, strconv.Itoa(lookalikePID))
		column(boolean, "f")
	case strings.Contains(sql, "FROM pg_locks"):
		column(integer, "0")
	default: // every lock and unlock
		column(boolean, "t")
	}
	description := &pgproto3.RowDescription{}
	for _, oid := range oids {
		description.Fields = append(description.Fields, pgproto3.FieldDescription{Name: []byte("c"), DataTypeOID: oid, TypeModifier: -1})
	}
	b.Send(description)
	b.Send(&pgproto3.DataRow{Values: values})
	b.Send(&pgproto3.CommandComplete{CommandTag: []byte("SELECT 1")})
}

// TestLock_A24_StubLocks: a server that says yes to two holders is refused
// before either is believed.
func TestLock_A24_StubLocks(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig(lookalike(t))
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	// What a client without the probe believes.
	for range 2 {
		conn := newConn(t, pool)
		if !one[bool](t, conn, `SELECT pg_try_advisory_lock(1)`) {
			t.Fatal("the server refused a lock, so that the test shows nothing")
		}
	}
	c := newClient(t, pool)
	key := pglock.KeyOf("a")
	for name, call := range map[string]func() error{
		"Lock":     func() error { _, err := c.Lock(t.Context(), key); return err },
		"TryLock":  func() error { _, err := c.TryLock(t.Context(), key); return err },
		"WithLock": func() error { return c.WithLock(t.Context(), key, nil) },
	} {
		if err := call(); err == nil || !strings.Contains(err.Error(), "advisory locks are not PostgreSQL's") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
