"""One file an operator: its contract, and the record that everything else reads."""
