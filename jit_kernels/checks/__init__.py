"""Whether an operator does what it promises, on the inputs that users run."""
