"""A cluster on one machine: attention timed on hosts joined by slow links."""
