"""The options of every table. `option` says what one is, `enumerate` lists them, `filters` takes
out what repeats another or fits nowhere. May import `problem` alone.
"""
