"""The models that `relvit.retrofit` takes, a file per family; `retrofit/recognise.py` chooses among them."""
