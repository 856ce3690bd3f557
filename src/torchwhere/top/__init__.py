"""The live screen of `torchwhere top`.

Entry point: `app.watch_screen`.
"""
