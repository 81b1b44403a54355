"""`python -m cortexmlx.bench.studies.embeddings`."""

from cortexmlx.bench.studies.embeddings.throughput import main

if __name__ == "__main__":
    main()
