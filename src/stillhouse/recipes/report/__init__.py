"""What is shown of runs: report page, charts, model cards."""
