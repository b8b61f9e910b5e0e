"""A scorer as a service: HTTP requests -> batches -> answers. It needs the extra `[serve]`; a
scorer alone does not.
"""
