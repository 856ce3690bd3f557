"""The report page: one file that opens from disk, with everything a run's boxes know."""
