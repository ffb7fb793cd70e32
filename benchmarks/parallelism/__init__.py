"""Replicas, pipeline stages and tensor-parallel ranks on a CPU."""
