"""Files: private files, strict JSON and JSON lines, with clear errors.

It needs the standard library only and imports nothing but `errors`.
"""

__all__ = ["collector", "git", "json_lines", "private_files", "regular_files", "strict_json"]
