"""Smaller tables: what they could become, what that costs in quality, and the least costly that
keep to a budget.
"""
