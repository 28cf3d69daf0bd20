"""Tables of mixed column types: from raw columns to class probabilities.

    frames        columns of numbers, text, dates  ->  numbers, NaN where a value is missing
    features      numbers  ->  the views of an ensemble's members
    ensemble      several views of one table, each encoded once, test rows in batches
    many_classes  more classes than a model knows, by the chain rule
    calibration   probabilities as sure as held-out training rows show them to be right
    classifier    all of it behind scikit-learn's interface
    files         two CSV files  ->  a training table and a test table
    prior         random tables to train on
    evaluation    a model on real tables, compared with other classifiers

What scikit-learn and pandas are needed for is imported when it is used:
`pip install 'weft-attention[tables]'`.
"""
