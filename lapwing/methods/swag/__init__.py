"""SWAG."""
