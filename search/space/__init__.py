"""Options of every table: `option` defines one, `enumerate` lists them, `filters` removes those
that repeat another or fit nowhere. May import `problem` alone.
"""
