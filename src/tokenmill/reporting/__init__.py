"""What report.html and report.json are made of: records as columns, the run over time, charts, words, examples."""
