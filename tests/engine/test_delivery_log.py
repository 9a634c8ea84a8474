"""Times of delivery are those of the newest requests."""

from octavo.engine.delivery_log import NUM_KEPT, DeliveryLog


def test_the_newest_are_kept():
    log = DeliveryLog()
    log.note([1, 2, 3], 5.0)
    assert [log.find(number) for number in (0, 1, 3)] == [None, 5.0, 5.0]
    for number in range(10, 10 + NUM_KEPT - 1):
        log.note([number], 6.0)
    assert [log.find(number) for number in (2, 3, 10)] == [None, 5.0, 6.0]
