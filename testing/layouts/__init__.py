"""Layouts of tensor, pipeline, data and expert parallelism, compared with one process."""
