//go:build unix

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strconv"
	"sync"
)

// tokenHeader carries the fencing token of a write.
const tokenHeader = "Fencing-Token"

// file is what the store keeps of a file: its text, and the highest token that
// has written it.
type file struct {
	Token int64
	Text  string
}

// A store keeps files over HTTP, and knows nothing of leases or PostgreSQL. All
// that it does for its writers is to remember a number and to compare.
type store struct {
	dir    *os.Root
	fenced bool // false is the control: it compares nothing

	mu sync.Mutex // from the look at the token to the end of the write
}

func (s *store) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /files/{name}", func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		answer(w, s.get, r.PathValue("name"))
	})
	mux.HandleFunc("PUT /files/{name}", func(w http.ResponseWriter, r *http.Request) {
		var next file
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&next.Text); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		var err error
		if next.Token, err = strconv.ParseInt(r.Header.Get(tokenHeader), 10, 64); err != nil || next.Token <= 0 {
			http.Error(w, "a write wants the token of its lease in "+tokenHeader, http.StatusPreconditionRequired)
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		answer(w, func(name string) (file, error) { return next, s.put(name, next) }, r.PathValue("name"))
	})
	return mux
}

// errFenced is 409.
var errFenced = errors.New("fenced")

// put writes a file unless a higher token has written it before. An equal one is
// the same holder's, who may write as often as it likes. Text and token are
// replaced in one rename: after a crash either both are there or neither.
func (s *store) put(name string, next file) error {
	before, err := s.get(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if s.fenced && next.Token < before.Token {
		return fmt.Errorf("%w: token %d comes too late, %d has written", errFenced, next.Token, before.Token)
	}
	text, err := json.Marshal(next)
	if err != nil {
		return err
	}
	f, err := s.dir.Create("new")
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return s.dir.Rename("new", name+".json")
}

func (s *store) get(name string) (f file, err error) {
	text, err := s.dir.ReadFile(name + ".json")
	if err != nil {
		return f, err
	}
	return f, json.Unmarshal(text, &f)
}

func answer(w http.ResponseWriter, what func(string) (file, error), name string) {
	f, err := what(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		http.Error(w, "no such file", http.StatusNotFound)
	case errors.Is(err, errFenced):
		http.Error(w, err.Error(), http.StatusConflict)
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	default:
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(f.Text) // who went away doesn't read it
	}
}
