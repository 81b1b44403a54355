"""What developers measure now and then: `python -m cortexmlx.bench.studies.NAME`."""
