"""placeholder"""
class PythonTests:
    def __init__(self, runner): pass
    def run(self, *a): return None
    def close(self): pass
