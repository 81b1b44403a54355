"""Measurements that developers make from time to time: `python -m cortexmlx.bench.studies.NAME`."""
