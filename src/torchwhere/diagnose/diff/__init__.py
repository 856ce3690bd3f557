"""Where ranks that should do the same part."""
