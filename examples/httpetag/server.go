package main

import (
	"encoding/json"
	"net/http"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/optimistic"
)

// A page is what the editors edit.
type page struct {
	ID   string `db:"id" json:"-"`
	Body string `db:"body" json:"body"`
}

var pages = optimistic.NewTable[page]("pages")

const createPages = `
	CREATE TABLE pages (
		id      text PRIMARY KEY,
		body    text NOT NULL,
		version bigint NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
	)`

// handler serves GET, PUT and DELETE of /pages/{id}.
func handler(pool *pgxpool.Pool) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /pages/{id}", func(w http.ResponseWriter, r *http.Request) {
		known, err := optimistic.IfNoneMatch(r.Header)
		if err != nil {
			fail(w, err)
			return
		}
		row, err := pages.Get(r.Context(), pool, r.PathValue("id"))
		if err == nil && known.Has(row.Version) {
			w.Header().Set("ETag", optimistic.ETag(row.Version))
			w.WriteHeader(http.StatusNotModified)
			return
		}
		answer(w, http.StatusOK, row, err)
	})
	mux.HandleFunc("PUT /pages/{id}", func(w http.ResponseWriter, r *http.Request) {
		var next page
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&next); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if r.Header.Get("If-None-Match") != "" {
			create(w, r, pool, next)
			return
		}
		version, err := expected(r, pool)
		if err != nil {
			fail(w, err)
			return
		}
		row, err := pages.CompareAndSet(r.Context(), pool, r.PathValue("id"), version, next)
		answer(w, http.StatusOK, row, err)
	})
	mux.HandleFunc("DELETE /pages/{id}", func(w http.ResponseWriter, r *http.Request) {
		version, err := expected(r, pool)
		if err == nil {
			err = pages.Delete(r.Context(), pool, r.PathValue("id"), version)
		}
		if err != nil {
			fail(w, err)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	return mux
}

// create is a PUT that may not overwrite.
func create(w http.ResponseWriter, r *http.Request, pool *pgxpool.Pool, next page) {
	none, err := optimistic.IfNoneMatch(r.Header)
	if err == nil && !none.Any {
		err = optimistic.ErrBadPrecondition
	}
	if err != nil {
		fail(w, err)
		return
	}
	row, created, err := pages.Insert(r.Context(), pool, r.PathValue("id"), next)
	if err == nil && !created {
		err = optimistic.ErrPreconditionFailed
	}
	answer(w, http.StatusCreated, row, err)
}

// expected is the version that the request was made on.
func expected(r *http.Request, pool *pgxpool.Pool) (int64, error) {
	match, err := optimistic.IfMatch(r.Header)
	if err != nil {
		return 0, err
	}
	return match.Version(func() (int64, error) {
		row, err := pages.Get(r.Context(), pool, r.PathValue("id"))
		return row.Version, err
	})
}

// answer sends a page with its tag, or why there is none.
func answer(w http.ResponseWriter, status int, row optimistic.Versioned[page], err error) {
	if err != nil {
		fail(w, err)
		return
	}
	w.Header().Set("ETag", optimistic.ETag(row.Version))
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(row.Value) // who went away doesn't read it
}

// fail tells clients what they did, and of the server no more than that it was.
func fail(w http.ResponseWriter, err error) {
	status := optimistic.Status(err)
	text := err.Error()
	if status >= 500 {
		text = http.StatusText(status)
	}
	http.Error(w, text, status)
}
