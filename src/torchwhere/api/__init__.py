"""The functions that users call: `import torchwhere` finds them here, one file for each
question."""
