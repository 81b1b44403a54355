"""Programs that ask a server: installed for the tests, and run in a home of their own."""
