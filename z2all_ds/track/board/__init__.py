"""A web page that shows runs while they train, and the reading behind it.

`curves` keeps a run's metrics in little memory; `events`, `health`, `mixture`, `probes` and `settings` read the rest.
`run` follows one run in a thread, `watch` all of them, here or over ssh (`remote`); `server` answers the page.
"""
