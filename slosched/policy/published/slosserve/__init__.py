"""SLOs-Serve's scheduler."""
