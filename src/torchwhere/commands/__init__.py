"""The commands, a file each: `add` puts it on the parser, the rest does it."""
