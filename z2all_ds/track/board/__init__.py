"""A web page that shows runs while they train, and the reading behind it.

`far_side` touches files, here or over ssh (`remote`); `curves` keeps a run's metrics in little memory, `events`,
`health`, `mixture`, `probes` and `settings` the rest; `run` follows one run in a thread, `watch` all of them; `server`
answers the page's requests.
"""
