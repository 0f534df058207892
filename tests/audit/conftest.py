from multi.conftest import ranks

__all__ = ["ranks"]
