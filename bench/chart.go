package main

import (
	"cmp"
	"fmt"
	"image/color"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
)

// legendRoom is how far the axis goes beyond the last of the goroutines, so that
// the legend stands beside the lines.
const legendRoom = 6

// chart draws the uncontended pairs, a line for each contender, both axes
// logarithmic. Where none were measured it draws nothing.
func (r results) chart(file string) error {
	settings := r.settings(pairs.name)
	if len(settings) == 0 {
		return nil
	}
	p := plot.New()
	p.BackgroundColor = color.White // readable on a dark page too
	p.Title.Text = pairs.title + fmt.Sprintf("\n%s, %d cores, %s", r.Machine.Processor, r.Machine.Cores, r.Date)
	if r.Quick {
		p.Title.Text += " (a quick run)"
	}
	p.X.Label.Text, p.Y.Label.Text = "goroutines", "pairs a second"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.Y.Tick.Marker = plot.LogTicks{Prec: -1}
	var ticks plot.ConstantTicks
	for _, setting := range settings {
		x, err := strconv.ParseFloat(setting, 64)
		if err != nil {
			return err
		}
		ticks = append(ticks, plot.Tick{Value: x, Label: setting})
	}
	p.X.Tick.Marker = ticks
	p.Legend.Top, p.Legend.Padding = true, vg.Millimeter
	p.Add(plotter.NewGrid())
	last := settings[len(settings)-1]
	// From the fastest down, as their lines end.
	end := func(a about) float64 {
		f, _ := r.find(pairs.name, last, a.Name, pairs.metrics[0].name)
		return f.Median
	}
	contenders := slices.SortedStableFunc(slices.Values(r.Contenders), func(a, b about) int { return cmp.Compare(end(b), end(a)) })
	for i, c := range contenders {
		var points plotter.XYs
		for n, setting := range settings {
			if f, ok := r.find(pairs.name, setting, c.Name, pairs.metrics[0].name); ok && f.Median > 0 {
				points = append(points, plotter.XY{X: ticks[n].Value, Y: f.Median})
			}
		}
		if len(points) == 0 {
			continue
		}
		line, marks, err := plotter.NewLinePoints(points)
		if err != nil {
			return err
		}
		line.Color, marks.Color, marks.Shape = plotutil.Color(i), plotutil.Color(i), plotutil.Shape(i)
		marks.Radius = vg.Points(3)
		line.Width = vg.Points(1.2)
		if c.Name == pawl.name {
			line.Width = vg.Points(3)
		}
		p.Add(line, marks)
		p.Legend.Add(c.Name, line, marks)
	}
	p.X.Max *= legendRoom
	return p.Save(18*vg.Centimeter, 12*vg.Centimeter, file)
}
