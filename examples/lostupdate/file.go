package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// files are what the run is to be written to, by the flags -html and -svg.
type files []*file

// file appears under its name when it is whole: until then it has another name
// in the same folder.
type file struct {
	path   string
	render func(io.Writer, results) error
	temp   *os.File
}

// create makes the files, so that a path which can't be written to ends the
// program before the run and not after it.
func create(o options) (_ files, err error) {
	var all files
	defer func() {
		if err != nil {
			all.discard()
		}
	}()
	for _, f := range []struct {
		flag, path string
		render     func(io.Writer, results) error
	}{{"html", o.html, writePage}, {"svg", o.svg, writePicture}} {
		if f.path == "" {
			continue
		}
		temp, err := beside(f.path)
		if err != nil {
			return nil, fmt.Errorf("-%s=%s: give a file in a folder that can be written to: %w", f.flag, f.path, err)
		}
		all = append(all, &file{f.path, f.render, temp})
	}
	return all, nil
}

// beside creates a file in the folder of path, with the rights of a new file.
// Renamed it would take the place of whatever is there, of /dev/stdout too.
func beside(path string) (*os.File, error) {
	is, err := os.Lstat(path)
	switch {
	case err == nil && !is.Mode().IsRegular():
		return nil, errors.New("it is there and not a regular file")
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	name := "." + filepath.Base(path) + "." + rand.Text()
	return os.OpenFile(filepath.Join(filepath.Dir(path), name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
}

// write gives each file its content and its name.
func (all files) write(r results, note func(string)) error {
	for _, f := range all {
		err := errors.Join(f.render(f.temp, r), f.temp.Close())
		if err == nil {
			err = os.Rename(f.temp.Name(), f.path)
		}
		if err != nil {
			return fmt.Errorf("write %s: %w", f.path, err)
		}
		note("Written to " + f.path)
	}
	return nil
}

// discard removes what was not written to its end.
func (all files) discard() {
	for _, f := range all {
		_ = f.temp.Close()
		_ = os.Remove(f.temp.Name())
	}
}
