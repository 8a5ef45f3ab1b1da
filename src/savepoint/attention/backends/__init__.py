"""The six ways to compute it. Each module offers `missing(device)`, `refusal(call)` and `attend(...)`; `select.py` chooses."""
