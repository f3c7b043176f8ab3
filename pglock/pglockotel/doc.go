// Package pglockotel makes OpenTelemetry's metrics and traces of what happens to
// leases, and counts conflicts. An Observer of New goes into pglock.New by
// pglock.WithObserver, and into optimistic.NewTable by optimistic.WithObserver. It
// takes OpenTelemetry's API only: what is exported, and how, is the program's choice.
//
// # Metrics
//
//	pglock.lease.count           up-down counter  {lease}     held at the moment of reading
//	pglock.lease.acquired        counter          {lease}     granted
//	pglock.lease.released        counter          {lease}     ended by their holder
//	pglock.lease.lost            counter          {lease}     ended otherwise, by pglock.lost.cause
//	pglock.lease.wait.duration   histogram        s           calls that had to wait, by pglock.wait.outcome
//	pglock.lease.hold.duration   histogram        s           from grant to end
//	pglock.campaign.failures     counter          {campaign}  Elect could not stand for it, by error.type
//	pglock.renewals              counter          {statement} by pglock.renewal.kind; failed: with error.type
//	pglock.write.fenced          counter          {write}     refused, for its lease had ended
//	pglock.fallbacks             counter          {fallback}  waiters are not woken by notifications
//	optimistic.conflicts         counter          {conflict}  by db.collection.name
//
// The count of held leases asks each lease when it is read: it has fallen before
// Lease.Context ends, in a process that runs also when nobody could be asked, and
// before the statement of a release is sent. The sum over all processes is
// therefore never above 1 for a name, but for readings that are not of one moment,
// and for a process that was stopped between its reading and its answer. (A lease
// whose release is blocked is held on, and is counted again.)
//
// The causes are expired, taken, released_by_force, released_by_its_holder and
// unreachable. A wait's outcome is granted, gave_up (its context ended, or the client
// was closed) or failed, which alone has an error.type. That is the SQLSTATE, timeout,
// or _OTHER.
//
// Lease names can be many: no metric has them, unless WithClass says how.
//
// # Traces
//
// A span pglock.lease.wait is a call that had to wait, and a span pglock.lease.hold
// a tenure, both under the span of the call of Acquire; they have pglock.lease.name,
// and the latter pglock.lease.token. A tenure links to the one before it of the same name,
// if that was of this Observer too and among the last 1,000 names. A loss is an
// error, and so is a wait that failed; one that was given up is not.
package pglockotel
