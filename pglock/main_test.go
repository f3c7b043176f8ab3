package pglock_test

import (
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
