package pgtest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/migrations"
)

// makeTemplate returns the name of a database that has the migrations and
// takes no connections. On a server of the user's it stays for the next run:
// its name tells which migrations it has.
func makeTemplate(s *shared) (_ string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	name, err := templateName()
	if err != nil {
		return "", err
	}
	conn, err := s.admin.Acquire(ctx)
	if err != nil {
		return "", err
	}
	defer conn.Release()
	// Packages are tested by processes of their own, all at once.
	const lock = "hashtextextended('pawl template', 0)"
	for locked := false; !locked; {
		if err := conn.QueryRow(ctx, "SELECT pg_try_advisory_lock("+lock+")").Scan(&locked); err != nil {
			return "", err
		}
		if !locked {
			time.Sleep(20 * time.Millisecond)
		}
	}
	defer func() {
		_, unlockErr := conn.Exec(context.WithoutCancel(ctx), "SELECT pg_advisory_unlock("+lock+")")
		err = errors.Join(err, unlockErr)
	}()
	var ready bool
	// It becomes a template when it is finished.
	err = conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1 AND datistemplate)", name).Scan(&ready)
	if err != nil || ready {
		return name, err
	}
	for _, sql := range []string{
		"DROP DATABASE IF EXISTS " + name + " WITH (FORCE)",
		"CREATE DATABASE " + name + " TEMPLATE template0",
	} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return "", err
		}
	}
	dsn, err := onDatabase(s.url, name)
	if err != nil {
		return "", err
	}
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return "", err
	}
	err = migrations.Up(ctx, pool)
	pool.Close()
	if err != nil {
		return "", err
	}
	_, err = conn.Exec(ctx, "ALTER DATABASE "+name+" WITH IS_TEMPLATE true ALLOW_CONNECTIONS false")
	return name, err
}

func templateName() (string, error) {
	files, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		return "", err
	}
	hash := sha256.New()
	for _, file := range files {
		text, err := fs.ReadFile(migrations.FS, file)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(hash, "%s %d\n%s", file, len(text), text)
	}
	return "pawl_template_" + hex.EncodeToString(hash.Sum(nil)[:6]), nil
}

// create makes a database for the test and drops it at its end.
func (s *shared) create(t testing.TB, template string) string {
	t.Helper()
	name := databaseName(t.Name())
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		_, err := s.admin.Exec(ctx, "CREATE DATABASE "+name+" TEMPLATE "+template)
		if err == nil {
			break
		}
		// A server's own workers may be looking into the template.
		var refused *pgconn.PgError
		if !errors.As(err, &refused) || refused.Code != "55006" {
			t.Fatal(err)
		}
	}
	dsn, err := onDatabase(s.url, name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() && (s.server == nil || keeping()) {
			kept.Store(name, true)
			t.Logf("the test's database stays: %s", dsn)
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if _, err := s.admin.Exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			t.Error(err)
		}
	})
	return dsn
}

var notWord = regexp.MustCompile(`[^a-z0-9]+`)

// databaseName is a name that tells whose database it is.
func databaseName(test string) string {
	test = strings.Trim(notWord.ReplaceAllString(strings.ToLower(test), "_"), "_")
	if len(test) > 40 {
		test = test[:40]
	}
	return "pawl_" + test + "_" + strings.ToLower(rand.Text()[:8])
}

// onDatabase is the DSN with another database, whether it is a URL or made of
// keywords.
func onDatabase(dsn, name string) (string, error) {
	return change(dsn, " dbname="+name, func(u *url.URL) { u.Path = "/" + name })
}

// onHost is the DSN with another address.
func onHost(dsn, address string) (string, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", err
	}
	return change(dsn, " host="+host+" port="+port, func(u *url.URL) { u.Host = address })
}

// With is the DSN with a parameter more, application_name for example.
func With(t testing.TB, dsn, name, value string) string {
	t.Helper()
	changed, err := change(dsn, " "+name+"="+value, func(u *url.URL) {
		query := u.Query()
		query.Set(name, value)
		u.RawQuery = query.Encode()
	})
	if err != nil {
		t.Fatal(err)
	}
	return changed
}

// change edits a DSN that is a URL; of one made of keywords the last of a name
// counts, so that more is appended to it.
func change(dsn, keywords string, edit func(*url.URL)) (string, error) {
	if !strings.Contains(dsn, "://") {
		return dsn + keywords, nil
	}
	u, err := url.Parse(dsn)
	if err != nil {
		return "", err
	}
	edit(u)
	return u.String(), nil
}
