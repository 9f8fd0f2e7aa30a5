"""Conformance: does a run do what the accountant of its differential privacy assumes?"""
