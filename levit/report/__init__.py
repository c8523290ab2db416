"""What a person looks at: progress, tables, plots and a page of a run."""
