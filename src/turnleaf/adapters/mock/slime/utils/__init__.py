"""`slime.utils`: samples, files, HTTP and metrics."""
