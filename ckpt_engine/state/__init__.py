"""State trees and their typed JSON, in both directions: flattened, laid out, divided among ranks, rebuilt."""
