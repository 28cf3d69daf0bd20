"""Tables of mixed column types: from columns to class probabilities.

    frames      columns of numbers and categories  ->  numbers, NaN where a value is missing
    features    numbers  ->  the views of an ensemble's members
    ensemble    several views of one table, each encoded once, test rows in batches
    classifier  all of it behind scikit-learn's interface
    prior       random tables to train on

What scikit-learn and pandas are needed for is imported when it is used.
"""
