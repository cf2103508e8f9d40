"""What a call should cost, from what it must do: predicted for the GPU that was measured, and for a B200.

``python -m bench.cost`` prints it beside a benchmark's figures. docs/cost.md explains the model and its parameters.
"""
