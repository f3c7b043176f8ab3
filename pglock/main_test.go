package pglock_test

import (
	"os"
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		os.Exit(child(os.Stdin, os.Stdout))
	}
	pgtest.Main(m)
}
