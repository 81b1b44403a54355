"""What a server tells of its work: counts of requests, and a text for Prometheus."""
