"""Several replicas of the server: the choice of a replica for a request, and Ray Serve."""
