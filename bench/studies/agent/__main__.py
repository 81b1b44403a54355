"""`python -m cortexmlx.bench.studies.agent`."""

from cortexmlx.bench.studies.agent.run import main

if __name__ == "__main__":
    main()
