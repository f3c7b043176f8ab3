//go:build !unix

package main

import "errors"

const canPause = false

func (p *process) pause() error  { return errors.ErrUnsupported }
func (p *process) resume() error { return errors.ErrUnsupported }
