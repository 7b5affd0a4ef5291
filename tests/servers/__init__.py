"""Servers and bad networks for tests: started on free ports, torn down whatever happens."""
