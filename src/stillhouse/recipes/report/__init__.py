"""What is shown of runs: report page and charts."""
