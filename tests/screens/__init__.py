"""What a whole chat looks like in windows of three sizes: `python -m tests.screens` writes the files anew."""
