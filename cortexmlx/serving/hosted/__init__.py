"""An engine whose model is spread over workers: in other processes, and on other machines."""
